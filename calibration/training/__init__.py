"""Training of small models: a differentiable form of the model, the paper's recipe, and its losses."""
