"""HTTP below the routes: bounded parsing, connection limit, authentication, body limits, and responses."""
