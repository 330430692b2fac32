//go:build unix

package servers

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"
)

// maxMessage bounds what a server may send before it is ready, so that some
// other program on the port cannot make us wait for gigabytes.
const maxMessage = 1 << 20

// dial connects for one handshake, which ends with the context. The deadline is
// short because await calls again.
func dial(ctx context.Context, address string) (net.Conn, error) {
	dialer := net.Dialer{Timeout: 2 * time.Second}
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { conn.Close() })
	return conn, conn.SetDeadline(time.Now().Add(5 * time.Second))
}

// greetPostgreSQL opens a session without a password, waits until the server is
// ready for a query, and returns the server's version.
func greetPostgreSQL(ctx context.Context, address, user, database string) (string, error) {
	conn, err := dial(ctx, address)
	if err != nil {
		return "", err
	}
	defer conn.Close()

	const protocol3 = 196608
	startup := binary.BigEndian.AppendUint32(make([]byte, 4), protocol3)
	startup = fmt.Appendf(startup, "user\x00%s\x00database\x00%s\x00\x00", user, database)
	binary.BigEndian.PutUint32(startup, uint32(len(startup)))
	if _, err := conn.Write(startup); err != nil {
		return "", err
	}

	var version string
	for reader := bufio.NewReader(conn); ; {
		kind, body, err := readPostgreSQLMessage(reader)
		if err != nil {
			return "", err
		}
		switch kind {
		case 'R':
			if len(body) < 4 || binary.BigEndian.Uint32(body) != 0 {
				return "", errors.New("the server asks for a password")
			}
		case 'S': // a setting: name and value, each ended by a zero
			name, value, _ := strings.Cut(string(body), "\x00")
			if name == "server_version" { // packagers add their own after a space
				version, _, _ = strings.Cut(strings.TrimRight(value, "\x00"), " ")
			}
		case 'E':
			return "", fmt.Errorf("the server refuses: %s", postgresqlErrorText(body))
		case 'Z':
			_, err := conn.Write([]byte{'X', 0, 0, 0, 4}) // good-bye
			return version, err
		}
	}
}

// readPostgreSQLMessage reads one message: a kind, a length that counts itself,
// and the body.
func readPostgreSQLMessage(r io.Reader) (kind byte, body []byte, err error) {
	var header [5]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return 0, nil, err
	}
	length := binary.BigEndian.Uint32(header[1:])
	if length < 4 || length > maxMessage {
		return 0, nil, errors.New("what answers is not PostgreSQL")
	}
	body = make([]byte, length-4)
	_, err = io.ReadFull(r, body)
	return header[0], body, err
}

// postgresqlErrorText is the field for people of an error message.
func postgresqlErrorText(body []byte) string {
	for _, field := range bytes.Split(body, []byte{0}) {
		if len(field) > 1 && field[0] == 'M' {
			return string(field[1:])
		}
	}
	return "no reason given"
}

// greetRabbitMQ sends the protocol header and waits for the server's first
// method, Connection.Start, which it sends once its listeners are open at the
// end of its boot. It returns the version from the server's properties.
func greetRabbitMQ(ctx context.Context, address string) (string, error) {
	conn, err := dial(ctx, address)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("AMQP\x00\x00\x09\x01")); err != nil {
		return "", err
	}

	// Frame: type, channel, size; payload: class, method, arguments; end octet.
	var header [7]byte
	if _, err := io.ReadFull(conn, header[:]); err != nil {
		return "", err
	}
	size := binary.BigEndian.Uint32(header[3:])
	if header[0] != 1 || size > maxMessage {
		return "", errors.New("what answers is not AMQP 0-9-1")
	}
	payload := make([]byte, size)
	if _, err := io.ReadFull(conn, payload); err != nil {
		return "", err
	}
	if !bytes.HasPrefix(payload, []byte{0, 10, 0, 10}) {
		return "", errors.New("the server did not begin with Connection.Start")
	}
	return rabbitmqVersion(payload), nil
}

// rabbitmqVersion finds the long string "version" in the table of properties.
func rabbitmqVersion(payload []byte) string {
	_, rest, found := bytes.Cut(payload, []byte("\x07versionS"))
	if !found || len(rest) < 4 {
		return ""
	}
	length := uint64(binary.BigEndian.Uint32(rest))
	if rest = rest[4:]; uint64(len(rest)) < length {
		return ""
	}
	return string(rest[:length])
}
