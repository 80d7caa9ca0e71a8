"""The public functions: each resolves names and specs and calls one package. Imports everything below analysis."""
