"""Several engines behind one API: which prefixes each replica holds, and which replica serves a request."""
