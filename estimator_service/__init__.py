"""The central estimator: merges what replicas observed and fits each pair's coefficients."""
