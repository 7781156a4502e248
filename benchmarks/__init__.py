"""ludic side by side with what a user would pick instead; every figure is a ratio of calls that took turns."""
