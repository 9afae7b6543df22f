"""The parts of HTTP that routes share: connections, access control, errors, JSON responses and the web page."""
