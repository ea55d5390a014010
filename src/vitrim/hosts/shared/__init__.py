"""Parts shared by the hosts of several libraries."""
