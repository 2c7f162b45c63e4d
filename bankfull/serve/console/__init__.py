"""The web console at `/`: chat, live charts, requests and batches. Static files, and the state document that they
poll."""
