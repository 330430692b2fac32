//go:build unix

package servers

import (
	"context"
	"net"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/devmappa/watermill-inbox/internal/servers"
)

// startRabbitMQ starts a server that ends with the test.
func startRabbitMQ(t *testing.T) *servers.RabbitMQ {
	t.Helper()
	server, err := servers.StartRabbitMQ(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	return server
}

// openChannel connects at the first try: a server that has started is ready.
func openChannel(t *testing.T, uri string) *amqp.Channel {
	t.Helper()
	conn, err := amqp.Dial(uri)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	channel, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	return channel
}

func TestRabbitMQKeepsItsMessagesAndPort(t *testing.T) {
	folder := ownTemp(t)
	server := startRabbitMQ(t)
	uri := server.URI()
	if server.Version() == "" {
		t.Error("no version")
	}

	channel := openChannel(t, uri)
	queues := map[string]amqp.Table{"classic": nil, "quorum": {"x-queue-type": "quorum"}}
	for queue, arguments := range queues {
		if _, err := channel.QueueDeclare(queue, true, false, false, false, arguments); err != nil {
			t.Fatal(err)
		}
		publishConfirmed(t, channel, queue)
	}
	for _, end := range endings(server) {
		name := end.name
		if err := end.do(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if conn, err := net.Dial("tcp", host(t, uri)); err == nil {
			conn.Close()
			t.Fatalf("%s: somebody still listens", name)
		}
		if err := server.Restart(context.Background()); err != nil {
			t.Fatalf("after %s: %v", name, err)
		}
		if server.URI() != uri {
			t.Errorf("after %s: the address is %s, it was %s", name, server.URI(), uri)
		}
		channel := openChannel(t, uri)
		for queue := range queues {
			receive(t, channel, queue)
		}
	}

	for range 2 {
		if err := server.Stop(); err != nil {
			t.Fatal(err)
		}
	}
	assertNoProcess(t, folder)
	if err := server.Restart(context.Background()); err == nil {
		t.Error("it started again after Stop")
	}
}

// publishConfirmed publishes a persistent message and waits until it is stored.
func publishConfirmed(t *testing.T, channel *amqp.Channel, queue string) {
	t.Helper()
	if err := channel.Confirm(false); err != nil {
		t.Fatal(err)
	}
	confirmation, err := channel.PublishWithDeferredConfirmWithContext(context.Background(), "", queue, true, false,
		amqp.Publishing{DeliveryMode: amqp.Persistent, Body: []byte("kept")})
	if err != nil {
		t.Fatal(err)
	}
	if !confirmation.Wait() {
		t.Fatal("the server did not store the message")
	}
}

// receive expects the message and does not acknowledge it: the server has it
// again when the connection ends.
func receive(t *testing.T, channel *amqp.Channel, queue string) {
	t.Helper()
	deliveries, err := channel.Consume(queue, queue, false, false, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	delivery, ok := <-deliveries
	if !ok || string(delivery.Body) != "kept" {
		t.Fatalf("%s: got %q, %v", queue, delivery.Body, ok)
	}
}

func TestEnsureStartsPrivateServers(t *testing.T) {
	folder := ownTemp(t)
	set, err := servers.Ensure(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	for _, server := range set.Servers {
		if server.Version == "" {
			t.Errorf("%s: no version", server)
		}
	}
	queryRow(t, set.Servers[0].Address, "SELECT 1")
	openChannel(t, set.Servers[1].Address)

	// A second set is given the addresses of the first and leaves it alone.
	t.Setenv(servers.PostgreSQLVariable, set.Servers[0].Address)
	t.Setenv(servers.RabbitMQVariable, set.Servers[1].Address)
	second, err := servers.Ensure(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	for i, server := range second.Servers {
		if server.Origin != servers.OriginGiven || server.Version != set.Servers[i].Version {
			t.Errorf("%s, the first one is %s", server, set.Servers[i])
		}
	}
	if err := second.Close(); err != nil {
		t.Error(err)
	}
	queryRow(t, set.Servers[0].Address, "SELECT 1")

	if err := set.Close(); err != nil {
		t.Error(err)
	}
	assertNoProcess(t, folder)
}
