"""`python -m trl_pods` is `trl-pods`."""

import sys

from .cli import main


sys.exit(main())
