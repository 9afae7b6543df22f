"""HTTP apart from the routes: connections, access control, errors, JSON responses and the web page."""
