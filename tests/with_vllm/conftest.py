"""Real engines. (A folder named `vllm` on the path of imports would pass for the package where that is missing.)"""

import engine_settings


collect_ignore = ["child"]  # for processes that tests start

if engine_settings.HAS_VLLM:
    engine_settings.install()
else:
    collect_ignore.append("server_cases.py")  # a script that needs what comes with vLLM
