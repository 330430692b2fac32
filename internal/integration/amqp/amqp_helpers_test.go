package amqp_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
)

// patience bounds every wait for something that must happen.
const patience = 30 * time.Second

func amqpURI(t testing.TB) string {
	t.Helper()
	uri := os.Getenv("WATERMILL_TEST_AMQP_URI")
	if uri == "" {
		t.Fatal("WATERMILL_TEST_AMQP_URI is not set. It is the address of the RabbitMQ to test against, " +
			"for example amqp://guest:guest@127.0.0.1:5672/. `make test` starts one and sets it.")
	}
	return uri
}

// await receives from ch, or fails the test when that takes longer than patience.
func await[T any](t testing.TB, ch <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(patience):
		t.Fatalf("waited %s for %s", patience, what)
		panic("unreachable")
	}
}

// broker is a plain AMQP client, the way a program without Watermill sees RabbitMQ.
type broker struct {
	testing.TB
	uri  string
	conn *amqp091.Connection
}

func newBroker(t testing.TB) *broker {
	t.Helper()
	b := &broker{TB: t, uri: amqpURI(t)}
	conn, err := amqp091.Dial(b.uri)
	if err != nil {
		t.Fatalf("RabbitMQ at WATERMILL_TEST_AMQP_URI: %v", err)
	}
	b.conn = conn
	t.Cleanup(func() { _ = conn.Close() })
	return b
}

// do runs f on a channel of its own: RabbitMQ closes a channel on most errors.
func (b *broker) do(f func(*amqp091.Channel) error) error {
	channel, err := b.conn.Channel()
	if err != nil {
		return err
	}
	defer func() { _ = channel.Close() }()
	return f(channel)
}

func (b *broker) must(f func(*amqp091.Channel) error) {
	b.Helper()
	if err := b.do(f); err != nil {
		b.Fatal(err)
	}
}

// name returns a name that only this test uses. The queue or exchange with it is deleted after the test.
func (b *broker) name(suffix string) string {
	name := strings.ReplaceAll(b.Name(), "/", ".") + "." + suffix + "." + watermill.NewShortUUID()
	b.Cleanup(func() {
		_ = b.do(func(c *amqp091.Channel) error { _, err := c.QueueDelete(name, false, false, false); return err })
		_ = b.do(func(c *amqp091.Channel) error { return c.ExchangeDelete(name, false, false) })
	})
	return name
}

// declare declares a durable queue.
func (b *broker) declare(queue string, arguments amqp091.Table) {
	b.Helper()
	b.must(func(c *amqp091.Channel) error {
		_, err := c.QueueDeclare(queue, true, false, false, false, arguments)
		return err
	})
}

// publish puts a message into a queue and waits until the broker has it.
func (b *broker) publish(queue string, publishing amqp091.Publishing) {
	b.Helper()
	if err := b.tryPublish(queue, publishing); err != nil {
		b.Fatal(err)
	}
}

// tryPublish returns the client library's error when it refuses to send, which closes the connection; so it is one of
// its own.
func (b *broker) tryPublish(queue string, publishing amqp091.Publishing) error {
	b.Helper()
	return newBroker(b).do(func(c *amqp091.Channel) error {
		if err := c.Confirm(false); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		confirmation, err := c.PublishWithDeferredConfirmWithContext(ctx, "", queue, false, false, publishing)
		if err != nil {
			return err
		}
		if confirmed, err := confirmation.WaitContext(ctx); err != nil || !confirmed {
			return fmt.Errorf("not confirmed: %w", err)
		}
		return nil
	})
}

// take waits for the only message of a queue, removes it and returns it as a plain client sees it.
func (b *broker) take(queue string) amqp091.Delivery {
	b.Helper()
	var delivery amqp091.Delivery
	b.must(func(c *amqp091.Channel) error {
		deliveries, err := c.Consume(queue, "", true, false, false, false, nil)
		if err != nil {
			return err
		}
		delivery = await(b, deliveries, "a message in "+queue)
		return nil
	})
	return delivery
}

// get removes one message from a queue, if there is one.
func (b *broker) get(queue string) (delivery amqp091.Delivery, ok bool) {
	b.Helper()
	b.must(func(c *amqp091.Channel) (err error) {
		delivery, ok, err = c.Get(queue, true)
		return err
	})
	return delivery, ok
}

// ready is the number of messages that wait in a queue, -1 if there is no such queue.
func (b *broker) ready(queue string) int {
	b.Helper()
	ready := -1
	_ = b.do(func(c *amqp091.Channel) error {
		state, err := c.QueueDeclarePassive(queue, true, false, false, false, nil)
		if err == nil {
			ready = state.Messages
		}
		return err
	})
	return ready
}

// waitForQueue waits until a queue is there, which only asking can tell.
func (b *broker) waitForQueue(queue string) {
	b.Helper()
	for deadline := time.Now().Add(patience); b.ready(queue) < 0; {
		if time.Now().After(deadline) {
			b.Fatalf("waited %s for queue %s", patience, queue)
		}
	}
}

// mustBeEmpty checks that nothing waits in a queue. Call it when no consumer is left, so that what was
// delivered and not acked is back.
func (b *broker) mustBeEmpty(queue string) {
	b.Helper()
	if ready := b.ready(queue); ready != 0 {
		b.Errorf("%d messages in %s, want 0", ready, queue)
	}
}

// config uses the topic as the name of a durable queue with the given arguments, with our marshaler,
// publisher confirms and a quick reconnect.
func (b *broker) config(arguments amqp091.Table) amqp.Config {
	config := amqp.NewDurableQueueConfig(b.uri)
	config.Marshaler = inboxamqp.Marshaler{}
	config.Publish.ConfirmDelivery = true
	config.Queue.Arguments = arguments
	config.Connection.Reconnect = amqp.DefaultReconnectConfig()
	config.Connection.Reconnect.BackoffInitialInterval = 10 * time.Millisecond
	return config
}

func (b *broker) subscriber(config amqp.Config, logger watermill.LoggerAdapter) *amqp.Subscriber {
	b.Helper()
	subscriber, err := amqp.NewSubscriber(config, logger)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = subscriber.Close() })
	return subscriber
}

func (b *broker) publisher(config amqp.Config) *amqp.Publisher {
	b.Helper()
	publisher, err := amqp.NewPublisher(config, watermill.NopLogger{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = publisher.Close() })
	return publisher
}

// startRouter runs a router with the given handlers. It is running when startRouter returns. The returned
// function closes it, as does the end of the test.
func startRouter(t testing.TB, logger watermill.LoggerAdapter, add func(*message.Router)) (stop func()) {
	t.Helper()
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: patience}, logger)
	if err != nil {
		t.Fatal(err)
	}
	add(router)

	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.Background()) }()
	await(t, router.Running(), "the router to run")

	stop = sync.OnceFunc(func() {
		if err := router.Close(); err != nil {
			t.Errorf("closing the router: %v", err)
		}
		if err := await(t, ended, "the router to end"); err != nil {
			t.Errorf("router: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// collect starts a router whose only handler passes on what it gets and acks. The returned function stops it
// when all that was handled is acked.
func collect(t testing.TB, subscriber message.Subscriber, topic string) (<-chan *message.Message, func()) {
	t.Helper()
	messages := make(chan *message.Message, 1000)
	var handled settling
	stop := startRouter(t, watermill.NopLogger{}, func(router *message.Router) {
		router.AddConsumerHandler("collect", topic, subscriber, func(msg *message.Message) error {
			handled.add(msg)
			messages <- msg
			return nil
		})
	})
	return messages, func() {
		t.Helper()
		handled.wait(t)
		stop()
	}
}

// settling waits until messages are acked or nacked. A subscriber that is closed before nacks what it has
// not yet acked, so a test that looks at the queue afterwards needs it.
type settling struct {
	lock sync.Mutex
	done []<-chan struct{}
}

// add is called by the handler: the subscriber cancels the context when the answer is on its way.
func (s *settling) add(msg *message.Message) {
	s.lock.Lock()
	defer s.lock.Unlock()
	s.done = append(s.done, msg.Context().Done())
}

func (s *settling) wait(t testing.TB) {
	t.Helper()
	s.lock.Lock()
	defer s.lock.Unlock()
	for i, done := range s.done {
		await(t, done, fmt.Sprintf("the answer to delivery %d", i+1))
	}
}

// errorLog counts the error lines of Watermill that contain a text.
type errorLog struct {
	watermill.NopLogger
	contains string
	lines    chan string
}

func newErrorLog(contains string) *errorLog {
	return &errorLog{contains: contains, lines: make(chan string, 1<<16)}
}

func (l *errorLog) Error(msg string, err error, _ watermill.LogFields) {
	if line := fmt.Sprintf("%s: %v", msg, err); strings.Contains(line, l.contains) {
		select {
		case l.lines <- line:
		default: // full: nobody counts that far
		}
	}
}

func (l *errorLog) With(watermill.LogFields) watermill.LoggerAdapter { return l }

// proxy passes connections on to RabbitMQ until they are cut.
type proxy struct {
	listener net.Listener
	target   string

	lock  sync.Mutex
	conns []net.Conn
	done  sync.WaitGroup
}

// newProxy returns a proxy and the URI that leads through it.
func newProxy(t testing.TB) (*proxy, string) {
	t.Helper()
	uri, err := amqp091.ParseURI(amqpURI(t))
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: listener, target: net.JoinHostPort(uri.Host, fmt.Sprint(uri.Port))}
	uri.Host, uri.Port = "127.0.0.1", listener.Addr().(*net.TCPAddr).Port

	p.done.Add(1)
	go p.accept()
	t.Cleanup(func() {
		_ = listener.Close()
		// A cut in the middle of a Close would block it for ever, and a Close can leave a connection open
		// (see main_test.go): give the clients time to end theirs, then end what is left.
		ended := make(chan struct{})
		go func() { p.done.Wait(); close(ended) }()
		select {
		case <-ended:
		case <-time.After(5 * time.Second):
			p.cut()
			await(t, ended, "the proxy to end")
		}
	})
	return p, uri.String()
}

func (p *proxy) accept() {
	defer p.done.Done()
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", p.target)
		if err != nil {
			_ = client.Close()
			continue
		}
		p.lock.Lock()
		p.conns = append(p.conns, client, server)
		p.lock.Unlock()
		p.done.Add(2)
		go p.pipe(client, server)
		go p.pipe(server, client)
	}
}

func (p *proxy) pipe(to, from net.Conn) {
	defer p.done.Done()
	_, _ = io.Copy(to, from)
	_ = to.Close()
	_ = from.Close()
}

// cut breaks all connections, without a word of AMQP.
func (p *proxy) cut() {
	p.lock.Lock()
	defer p.lock.Unlock()
	for _, conn := range p.conns {
		_ = conn.Close()
	}
	p.conns = nil
}
