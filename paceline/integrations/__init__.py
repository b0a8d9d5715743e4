"""Where Paceline meets other software: models and drafters as others load them, and rollouts inside other trainers."""
