"""SGLang's side of the connector, without SGLang: pages of a host pool, named by the engine's own keys.

``identity`` what the pages of a pool mean · ``supported`` which pools are kept · ``options`` what a user sets ·
``host_pages`` copies between a pool and the arena · ``found_pages`` what a lookup found and holds ·
``pages`` the three calls that carry pages · ``transfer_rates`` how fast they were · ``versions`` of SGLang
"""
