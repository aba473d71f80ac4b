/* What kvstore._core has, a line for each: METHOD(name, signature, what it does). The function is core_<name>_method, in
 * any of the C files beside this one, with the arguments of METH_VARARGS. Signatures are part of the ABI's number:
 * `make core-layout` behind every change. */
METHOD(find, "(headers, geometry, namespace, length, hashes, /)",
       "One byte a page: 1 where it is in the arena, else 0.")
METHOD(search, "(headers, geometry, namespace, length, hashes, /)",
       "The leading pages that are in the arena: a list of their frames, and one of their generations.")
METHOD(load, "(headers, geometry, pages, namespace, length, edition, hashes, into, /)",
       "Search for pages and copy the leading ones; how many are whole and right.")
METHOD(where, "(headers, geometry, namespace, length, edition, hashes, summary, buckets, word, seed, /)",
       "One byte a page: 1 where it is in the arena, 0 where it is nowhere, 255 where only the node can tell.")
METHOD(copy_slots, "(pages, offsets, length, buffers, out, /)",
       "Copy buffers into slots at these offsets, or out of them.")
METHOD(copy_runs, "(targets, sources, run_bytes, regions, /)",
       "Copy runs between addresses that lie in these regions.")
METHOD(begin_changes, "(headers, geometry, frames, owner, /)",
       "Make the generations of slots odd and clear their words: one byte a slot, 1 where it held a page, 2 where that\n"
       "page's word is not in its home bucket, else 0.")
METHOD(publish, "(headers, geometry, frames, hashes, checksums, sequence, namespace, length, /)",
       "Write headers of slots, make their generations even, and name them in their home buckets: one byte a slot, 0 where\n"
       "there is no room for it, else 1.")
METHOD(put_tags, "(summary, buckets, keys, /)",
       "Say of pages that they may be in a lower tier: how many buckets are full from now on.")
METHOD(take_tags, "(summary, buckets, keys, /)", "Say no longer of pages that they may be in a lower tier.")
METHOD(join, "(hashes, /)", "Block hashes back to back; None where something is no such hash.")
METHOD(look, "(fd, microseconds, /)", "Whether something can be received, looked for without sleeping for so long at most.")
METHOD(receive, "(fd, into, /)", "Receive what is there: its bytes, 0 at the end, -1 where nothing is there yet.")
METHOD(send, "(fd, data, /)", "Send what goes without waiting: its bytes.")
