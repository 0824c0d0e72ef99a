"""Language models made of the layers, their loss, and sampling."""
