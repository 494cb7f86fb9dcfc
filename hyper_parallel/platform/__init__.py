"""One package per framework that the clip runs under."""
