"""The web page at `/`: chat, live charts, requests and batches. Static files, and one document that they ask for."""
