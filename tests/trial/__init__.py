"""The trial: random models, options and requests on the engine or the server, compared with a plain loop."""
