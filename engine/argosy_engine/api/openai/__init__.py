"""OpenAI endpoints: requests to generations, and outputs to the shapes of the API. They know no HTTP server."""
