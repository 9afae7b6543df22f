"""HTTP around the routes: connections, access, errors, JSON, the web page's files."""
