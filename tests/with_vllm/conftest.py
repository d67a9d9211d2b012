import engine_settings


if engine_settings.HAS_VLLM:
    engine_settings.install()
