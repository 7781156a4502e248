"""Analyse a finished run: plan its batches by other rules, find the first step of a fault, copy one step."""
