"""Files that clients upload, and files with the answers of batches, in a folder of the operator."""
