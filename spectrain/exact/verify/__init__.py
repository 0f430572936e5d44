"""Verification rules: probabilities and uniforms in, verdict out."""
