"""Places on other machines, one module for each client library. They are imported when an address names them."""
