"""What a run wrote, for a person to read: rows of text, a page in the browser, exports."""
