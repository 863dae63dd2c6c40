#!/bin/sh
# What tshark makes of the DDP segments in nfs3-siw.pcap, and of the RPC-over-RDMA headers in them; writes
# nfs3-siw.tshark.tsv to standard output. One line per packet that completes a segment, none of which completes two;
# fields with several values have them in the order of the header, joined by commas.
cd "$(dirname "$0")" || exit 1
exec tshark -r nfs3-siw.pcap -Y iwarp_ddp_rdmap -T fields -E header=y -E separator=/t -E aggregator=, \
    -e frame.number -e tcp.srcport \
    -e iwarp_mpa.ulpdulength -e iwarp_ddp.tagged_flag -e iwarp_ddp.last_flag -e iwarp_rdma.opcode \
    -e iwarp_ddp.stag -e iwarp_ddp.tagged_offset -e iwarp_ddp.qn -e iwarp_ddp.msn -e iwarp_ddp.mo \
    -e iwarp_rdma.inval_stag -e iwarp_rdma.sinkstag -e iwarp_rdma.sinkto -e iwarp_rdma.rdmardsz \
    -e iwarp_rdma.srcstag -e iwarp_rdma.srcto \
    -e rpcordma.xid -e rpcordma.version -e rpcordma.flow_control -e rpcordma.msg_type \
    -e rpcordma.reads_count -e rpcordma.writes_count -e rpcordma.reply_count \
    -e rpcordma.position -e rpcordma.segment_count \
    -e rpcordma.rdma_handle -e rpcordma.rdma_length -e rpcordma.rdma_offset
