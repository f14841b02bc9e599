"""Small real models that draft and verify like large ones, and what makes and measures them."""
