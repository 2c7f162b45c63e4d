"""How two processes that know the same token find out that the other end knows it, too: the server and the gateway of a
replica, rank 0 and the hosts of the other ranks, engines that compute prompts and engines that decode."""
