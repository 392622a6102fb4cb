"""The cloud verifier: runs the target model over the blocks of many sessions."""
