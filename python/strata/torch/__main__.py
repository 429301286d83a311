"""`python -m strata.torch train.py ...` runs a script that says "gloo" with Strata in gloo's place."""
