//go:build unix

package servers

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"strings"
	"testing"
)

// serveOnce answers one connection with these bytes after it has read n.
func serveOnce(t *testing.T, n int, answer []byte) string {
	t.Helper()
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		io.ReadFull(conn, make([]byte, n))
		conn.Write(answer)
		io.Copy(io.Discard, conn)
	}()
	return listener.Addr().String()
}

// message is one message of PostgreSQL's protocol.
func message(kind byte, body string) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{kind}, uint32(len(body)+4)), body...)
}

func TestGreetPostgreSQL(t *testing.T) {
	join := func(messages ...[]byte) (all []byte) {
		for _, m := range messages {
			all = append(all, m...)
		}
		return all
	}
	ok, ready := message('R', "\x00\x00\x00\x00"), message('Z', "I")
	tests := []struct {
		name    string
		answer  []byte
		version string
		err     string
	}{
		{"ready", join(ok, message('S', "client_encoding\x00UTF8\x00"), message('S', "server_version\x0015.20 (Debian 15.20-0+deb12u1)\x00"), ready), "15.20", ""},
		{"starting up", message('E', "SFATAL\x00C57P03\x00Mthe database system is starting up\x00\x00"), "", "is starting up"},
		{"password", message('R', "\x00\x00\x00\x0aSCRAM-SHA-256\x00\x00"), "", "password"},
		{"something else", []byte("HTTP/1.1 400 Bad Request\r\n\r\n"), "", "not PostgreSQL"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			address := serveOnce(t, 8, test.answer)
			version, err := greetPostgreSQL(context.Background(), address, "postgres", "postgres")
			if version != test.version || (err != nil) != (test.err != "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("greetPostgreSQL() = %q, %v, want %q, %q", version, err, test.version, test.err)
			}
		})
	}
}

func TestGreetRabbitMQ(t *testing.T) {
	properties := "\x07productS\x00\x00\x00\x08RabbitMQ\x07versionS\x00\x00\x00\x063.10.8"
	start := "\x00\x0a\x00\x0a\x00\x09" + string(binary.BigEndian.AppendUint32(nil, uint32(len(properties)))) + properties
	frame := append(binary.BigEndian.AppendUint32([]byte{1, 0, 0}, uint32(len(start))), start+"\xce"...)
	tests := []struct {
		name    string
		answer  []byte
		version string
		err     string
	}{
		{"ready", frame, "3.10.8", ""},
		{"another version of the protocol", []byte("AMQP\x00\x01\x00\x00"), "", "not AMQP"},
		{"something else", append([]byte{1, 0, 0, 0, 0, 0, 4}, 0, 20, 0, 10), "", "Connection.Start"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			address := serveOnce(t, 8, test.answer)
			version, err := greetRabbitMQ(context.Background(), address)
			if version != test.version || (err != nil) != (test.err != "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("greetRabbitMQ() = %q, %v, want %q, %q", version, err, test.version, test.err)
			}
		})
	}
	if got := rabbitmqVersion([]byte("\x07versionS\xff\xff\xff\xff3")); got != "" {
		t.Errorf("a cut-off version gave %q", got)
	}
}
