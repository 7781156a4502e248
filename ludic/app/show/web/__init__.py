"""The web pages of `ludic view --web`: server.py serves them, pages.py says how a page is added."""
