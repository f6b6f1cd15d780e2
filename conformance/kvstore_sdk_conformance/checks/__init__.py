"""The checks: each function proves one requirement, which its decorator names."""
