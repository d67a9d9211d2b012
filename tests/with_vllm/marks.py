import pytest
from engine_settings import HAS_VLLM


needs_vllm = [
    pytest.mark.vllm,
    pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed; .ci/vllm makes an environment with it"),
]
