"""Ragged paged attention: queries of many sequences on one packed axis, keys and values in pages."""
