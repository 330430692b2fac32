package inbox_test

import (
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
)

func TestConstructorsRefuse(t *testing.T) {
	t.Parallel()
	repository := inboxtest.NewMemoryRepository()
	if _, err := inbox.NewMiddleware(nil, inbox.Options{}); err == nil {
		t.Error("nil repository accepted")
	}
	if _, err := inbox.NewMiddleware(repository, inbox.Options{ClaimTimeout: -1}); err == nil {
		t.Error("negative claim timeout accepted")
	}
	if _, err := inbox.NewCleaner(nil, inbox.CleanerOptions{Consumers: inbox.AllConsumers(), Retention: inbox.Retention{Default: time.Hour}}); err == nil {
		t.Error("nil repository accepted")
	}
	hour := inbox.Retention{Default: time.Hour}
	for name, options := range map[string]inbox.CleanerOptions{
		"no retention":              {},
		"negative retention":        {Retention: inbox.Retention{Default: -time.Hour}},
		"no retention of a name":    {Retention: inbox.Retention{Default: time.Hour, Consumers: map[string]time.Duration{"c": 0}}},
		"negative one of a name":    {Retention: inbox.Retention{Default: time.Hour, Consumers: map[string]time.Duration{"c": -1}}},
		"no name":                   {Retention: inbox.Retention{Default: time.Hour, Consumers: map[string]time.Duration{"": 1}}},
		"negative batch size":       {Retention: hour, BatchSize: -1},
		"negative pause":            {Retention: hour, BatchPause: -1},
		"negative timeout":          {Retention: hour, BatchTimeout: -1},
		"negative interval":         {Retention: hour, Interval: -1},
		"negative unsent retention": {Retention: hour, UnsentRetention: -1},
	} {
		options.Consumers = inbox.AllConsumers()
		if _, err := inbox.NewCleaner(inboxtest.NewMemoryRepository(), options); err == nil {
			t.Errorf("%s accepted", name)
		}
	}
	for name, options := range map[string]inbox.TooOldOptions{
		"refuse without a retention": {Refuse: true},
		"time without a retention":   {Time: inbox.TimeFromMetadata("at")},
		"only of a consumer":         {Retention: inbox.Retention{Consumers: map[string]time.Duration{"c": 1}}},
		"negative retention":         {Retention: inbox.Retention{Default: -1}},
	} {
		if _, err := inbox.NewMiddleware(repository, inbox.Options{TooOld: options}); err == nil {
			t.Errorf("TooOld: %s accepted", name)
		}
	}
}

func TestTimeOfMessages(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC)
	msg := message.NewMessage("1", nil)
	msg.Metadata.Set("at", at.Format(time.RFC3339))
	msg.Metadata.Set("text", "yesterday")
	if got, ok := inbox.TimeFromMetadata("at")(msg); !ok || !got.Equal(at) {
		t.Errorf("%s, %v", got, ok)
	}
	for _, field := range []string{"text", "none"} {
		if got, ok := inbox.TimeFromMetadata(field)(msg); ok {
			t.Errorf("%s is %s", field, got)
		}
	}
}
