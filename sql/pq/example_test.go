package inboxpq_test

import (
	"context"
	"database/sql"
	"log"
	"net"
	"time"

	"github.com/lib/pq"

	inboxpq "github.com/devmappa/watermill-inbox/sql/pq"
)

// A dialer that gives up on a server that says nothing for so long, which must be longer than the longest statement.
// Lib/pq reads only while it waits for an answer.
type patientDialer struct{ patience time.Duration }

func (d patientDialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return patientConn{conn, d.patience}, nil
}

func (d patientDialer) Dial(network, address string) (net.Conn, error) {
	return d.DialContext(context.Background(), network, address)
}

func (d patientDialer) DialTimeout(network, address string, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return d.DialContext(ctx, network, address)
}

type patientConn struct {
	net.Conn
	patience time.Duration
}

func (c patientConn) Read(data []byte) (int, error) {
	if err := c.SetReadDeadline(time.Now().Add(c.patience)); err != nil {
		return 0, err
	}
	return c.Conn.Read(data)
}

func (c patientConn) Write(data []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(c.patience)); err != nil {
		return 0, err
	}
	return c.Conn.Write(data)
}

// With a bound on connecting, and one on silence, which lib/pq needs for each of its statements and the connector for the
// commit.
func ExampleNewConnector() {
	connector, err := pq.NewConnector("postgres://localhost/shop?connect_timeout=5")
	if err != nil {
		log.Fatal(err)
	}
	connector.Dialer(patientDialer{2 * time.Minute})
	fused, err := inboxpq.NewConnector(connector)
	if err != nil {
		log.Fatal(err)
	}
	db := sql.OpenDB(fused)
	defer db.Close()
}
