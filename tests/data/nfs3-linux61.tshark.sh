#!/bin/sh
# What tshark makes of the RPC-over-RDMA headers in nfs3-linux61.pcap; writes nfs3-linux61.tshark.tsv to standard
# output. One line per packet; fields with several values have them in the order of the header, joined by commas.
cd "$(dirname "$0")" || exit 1
exec tshark -r nfs3-linux61.pcap -Y rpcordma -T fields -E header=y -E separator=/t -E aggregator=, \
    -e frame.number -e ip.src -e infiniband.bth.psn \
    -e rpcordma.xid -e rpcordma.version -e rpcordma.flow_control -e rpcordma.msg_type \
    -e rpcordma.reads_count -e rpcordma.writes_count -e rpcordma.reply_count \
    -e rpcordma.position -e rpcordma.segment_count \
    -e rpcordma.rdma_handle -e rpcordma.rdma_length -e rpcordma.rdma_offset
