"""What of a prompt is restored, what is computed, and how stored blocks become the keys and values of a layer."""
