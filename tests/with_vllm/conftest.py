import engine_settings


collect_ignore = ["child"]  # for processes that tests start

if engine_settings.HAS_VLLM:
    engine_settings.install()
