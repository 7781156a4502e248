"""Settings of every Ray in the tests."""

VARIABLES = {
    "RAY_AUTH_MODE": "disabled",  # else it writes a token into the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # by default 15: beside other tests, its processes would hardly ever run
    "RAY_memory_monitor_refresh_ms": "0",  # else it kills processes of its own where others fill the memory
}
"""Environment variables, to be set before Ray is imported."""
