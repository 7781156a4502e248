"""What a run is doing now: its status, the panel of `ludic watch`, and text for a terminal."""
