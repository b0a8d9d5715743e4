"""Integrations: models and drafters in the formats of other software, and rollouts inside other trainers."""
