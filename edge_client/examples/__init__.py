"""Programs that a reader can run against `edge-client serve`."""
