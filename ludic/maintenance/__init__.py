"""Keep a root tidy and sound: compact, expire, quarantine, verify."""
