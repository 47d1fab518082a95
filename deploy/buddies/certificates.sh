#!/bin/sh
# Makes a CA for buddies, and a certificate and a key for each node.
#
#   certificates.sh DIRECTORY NAME[,NAME...] ...
#
# Each argument after the directory is one node: its host name or address, as in the other node's `buddy` setting, and further
# names after commas. Writes DIRECTORY/ca.pem (for tls_ca, everywhere) and DIRECTORY/<first name>.{pem,key} (tls_cert and tls_key, on that
# node only). DIRECTORY/ca.key signs more nodes later: keep it off the nodes. DAYS is how long certificates last (365).
set -eu
umask 077
[ $# -ge 2 ] || { sed -n '2,9p' "$0" >&2; exit 2; }
folder=$1
shift
mkdir -p "$folder"

if [ ! -e "$folder/ca.key" ]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj "/CN=headrace buddies" \
        -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign,cRLSign" \
        -keyout "$folder/ca.key" -out "$folder/ca.pem" 2>/dev/null
fi

for node in "$@"; do
    first=${node%%,*}
    names=$(printf '%s' "$node" | tr ',' '\n' | while read -r name || [ -n "$name" ]; do
        case $name in
            *:* | *[0-9].*[0-9].*[0-9].*[0-9]) printf ',IP:%s' "$name" ;;
            *) printf ',DNS:%s' "$name" ;;
        esac
    done)
    extensions=$(mktemp)
    {
        echo "basicConstraints=critical,CA:FALSE"
        echo "keyUsage=critical,digitalSignature"
        echo "extendedKeyUsage=serverAuth,clientAuth"
        echo "subjectKeyIdentifier=hash"
        echo "authorityKeyIdentifier=keyid"
        echo "subjectAltName=${names#,}"
    } > "$extensions"
    openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=${first}" \
        -keyout "$folder/$first.key" -out "$folder/$first.csr" 2>/dev/null
    openssl x509 -req -in "$folder/$first.csr" -CA "$folder/ca.pem" -CAkey "$folder/ca.key" -CAcreateserial \
        -days "${DAYS:-365}" -extfile "$extensions" -out "$folder/$first.pem" 2>/dev/null
    rm -f "$folder/$first.csr" "$extensions"
    echo "$folder/$first.pem: ${names#,}"
done
