// Shows the description of the API. The button Authorize takes an API key.

SwaggerUIBundle({ url: "openapi.json", dom_id: "#docs", persistAuthorization: true });
