"""Records as pages, pictures, tables of the documents and long texts: pure functions of what a record holds."""
