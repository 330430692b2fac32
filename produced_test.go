package inbox_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
)

// golden is version 1 of the stored form, as instances of other versions read and have written it. It holds
// the UUID that a message without one is given, which must stay the same for ever.
const golden = "\x01" +
	"\x1a\x07event-1\x02\x01a\x01b\x01b\x01\xff\x08{\"id\":1}" +
	"\x27\x246aa090a3-55d0-5a74-a328-87992f8db585\x00\x00"

func TestStoredFormIsVersionOne(t *testing.T) {
	t.Parallel()
	repository := inboxtest.NewMemoryRepository()
	once, err := inbox.NewMiddleware(repository, inbox.Options{Consumer: consumer})
	if err != nil {
		t.Fatal(err)
	}
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	router.AddMiddleware(once.Middleware)
	broker := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	ctx, cancel := context.WithCancel(context.Background())
	router.AddHandler("h", "payments", broker, "events", failingPublisher{cancel}, func(*message.Message) ([]*message.Message, error) {
		event := message.NewMessage("event-1", []byte(`{"id":1}`))
		event.Metadata.Set("b", "\xff")
		event.Metadata.Set("a", "b")
		return []*message.Message{event, message.NewMessage("", nil)}, nil
	})
	stopped := make(chan error)
	go func() { stopped <- router.Run(ctx) }()
	<-router.Running()
	if err := broker.Publish("payments", message.NewMessage("payment-7", nil)); err != nil {
		t.Fatal(err)
	}
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	if err := once.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	stored, err := repository.FindRecords(context.Background(), inbox.Selection{Unsent: true}, inbox.Record{}, 2)
	if err != nil || len(stored) != 1 || string(stored[0].Produced) != golden {
		t.Fatalf("stored\n%q\nwant\n%q\n%v", stored, golden, err)
	}
	list, err := inbox.ListUnsent(context.Background(), repository, -time.Hour, inbox.Record{}, 1)
	if err != nil || len(list) != 1 || list[0].Err != nil {
		t.Fatalf("%+v, %v", list, err)
	}
	if got := list[0].Messages; list[0].Topic != "events" || len(got) != 2 || got[0].UUID != "event-1" || got[0].Metadata.Get("b") != "\xff" ||
		got[1].UUID != "6aa090a3-55d0-5a74-a328-87992f8db585" {
		t.Fatalf("read %+v", list[0])
	}
}

// failingPublisher fails and ends the test's router.
type failingPublisher struct{ stop func() }

func (p failingPublisher) Publish(string, ...*message.Message) error {
	p.stop()
	return errors.New("the broker is away")
}

func (failingPublisher) Close() error { return nil }
