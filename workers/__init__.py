"""What runs beside the engine, and the models that it is tried on."""
