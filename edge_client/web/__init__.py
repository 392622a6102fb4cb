"""The chat page: plain HTML, CSS and JavaScript."""
