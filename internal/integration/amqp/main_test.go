package amqp_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if configuration := os.Getenv(consumerVariable); configuration != "" {
		os.Exit(consumerMain(configuration))
	}
	goleak.VerifyTestMain(m,
		// watermill-amqp v2.1.3: when Close ends the connection before the reconnect goroutine has seen that
		// it is closing, that goroutine may connect again, and nobody closes the new connection.
		goleak.IgnoreAnyFunction("github.com/rabbitmq/amqp091-go.(*Connection).reader"),
		goleak.IgnoreAnyFunction("github.com/rabbitmq/amqp091-go.(*Connection).heartbeater"),
		// The same version: when the connection breaks during Close, the client library waits for ever for
		// somebody to read the notification, and Close for the client library.
		goleak.IgnoreAnyFunction("github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp.(*ConnectionWrapper).Close"),
	)
}
